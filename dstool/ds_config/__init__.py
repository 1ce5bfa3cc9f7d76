"""The DeepSpeed JSON: write one (`build`), read one and bring it together with the run file (`read`)."""
