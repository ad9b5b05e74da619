"""Text to tokenized corpus to an ordered, audited stream of batches. Start reading at
`stream.py`.
"""
