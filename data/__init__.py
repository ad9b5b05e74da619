"""Text -> tokenized corpus -> the batch of step N."""
