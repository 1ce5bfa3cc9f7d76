"""What the tests of the JSON share."""

AUTO = "auto"
OWN = {
    "train_batch_size": AUTO,
    "train_micro_batch_size_per_gpu": AUTO,
    "gradient_accumulation_steps": AUTO,
    "gradient_clipping": AUTO,
}
"""The keys that Trainer fills in where they are there."""
