"""ZeRO checkpoints: which files make one (`layout`), their weights (`assemble`), writing them (`writer`)."""
