"""The commands `rlcore verify` and `rlcore new-plugin`."""
