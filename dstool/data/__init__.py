"""Dataset files to batches."""
