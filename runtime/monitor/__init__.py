"""GPUs, slow ranks, and where the time of a step goes.

clock.py                   Where the time of a step goes, without making the device wait
device_alarms.py           When the readings of a GPU are worth waking somebody: pure function
device_reader.py           Reads every GPU of this host in a process of its own: `python -m ru
device_table.py            What the states of a GPU mean and what to do about them: tables, an
devices.py                 Listens to the reader of this host's GPUs (runtime.monitor.device_r
hardware.py                The hardware under a run: GPUs of all hosts and own times of all ra
key_value_store.py         Small facts from every rank to rank 0, beside training: nobody wait
own_time.py                How long a rank needs for its own work in a step: the time it does
profiling.py               Records some steps of a run with torch's profiler (`log.profile=A:B
speed.py                   Tokens per second and model FLOP utilisation, and the peak of the d
stragglers.py              Which rank is slow, from the own times of all ranks (runtime.monito
"""
