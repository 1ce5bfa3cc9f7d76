"""ZeRO checkpoints: which files make one (`layout`), their weights (`reader`), writing them (`writer`)."""

from dstool.checkpoint.reader import Weights, load_into, open_checkpoint

__all__ = ["Weights", "load_into", "open_checkpoint"]
