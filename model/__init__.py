"""The decoder: single-device code that knows nothing of the cluster.

attention.py               Causal attention inside documents, and rotary positions
config.py                  The decoder's shape as a Hugging Face configuration
cost.py                    Parameters, FLOPs per token and bytes of activations, as formulas
decoder.py                 Embedding, blocks, norm and head
families.py                Hugging Face families with the decoder's weights
init.py                    Initial weights, equal on every layout
layers.py                  Matrix product, embedding and RMSNorm
loss.py                    Cross-entropy that never holds all logits
recompute.py               Activation checkpointing
"""
