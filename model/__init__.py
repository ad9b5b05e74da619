"""The decoder: single-device code that knows nothing of the cluster.

attention.py               Causal attention that stays inside documents, and the rotary positi
config.py                  The shape of the decoder as a Hugging Face configuration, and the s
cost.py                    Exact arithmetic of the decoder: parameters, FLOPs per token, bytes
decoder.py                 The decoder: embedding, blocks of attention and gated MLP, norm, he
init.py                    Initial weights as a pure function of (seed, canonical name, shape)
layers.py                  The small modules a decoder block is made of: matrix product, embed
loss.py                    Next-token cross-entropy without ever holding all logits
recompute.py               What a block keeps for its backward, and what it runs again
"""
