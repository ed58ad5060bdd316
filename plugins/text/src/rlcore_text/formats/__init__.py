"""Row formats: the layouts of other libraries' data sets, each converted to rlcore's fields. One file holds one format."""
