"""dstool: the whole life of a Hugging Face model trained with DeepSpeed.

Importing this package is free of torch, deepspeed and transformers. The functions behind the
commands are imported from their own modules, and start torch when they are imported:

    from dstool.train import train
    from dstool.consolidate import consolidate
    from dstool.merge import merge
    from dstool.infer import infer
"""

__version__ = "0.1.0"
