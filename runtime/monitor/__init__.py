"""GPUs, slow ranks, and how the time of a step is spent.

clock.py                   Seconds of each part of a step, without making the device wait
device_alarms.py           Decides which readings of a GPU are an alarm: pure functions
device_reader.py           Reads every GPU of this host, in a process of its own
device_table.py            States and errors of GPUs, with their meaning and what to do: tables
devices.py                 Listens to the process that reads this host's GPUs
hardware.py                One rank's part of the watch: own times, GPUs of its host
key_value_store.py         Small facts from every rank to rank 0, without a collective
own_time.py                Own time of a rank in a step: the time without waits for other ranks
profiling.py               Records some steps with torch's profiler (`log.profile=A:B`)
readings.py                Rank 0: turns what all ranks have posted into news for the record
speed.py                   Tokens per second, model FLOP utilisation, peaks of known devices
stamps.py                  Time stamps on a GPU: CUDA events, read late
stragglers.py              Decides which rank is slow, from the own times of all ranks
"""
