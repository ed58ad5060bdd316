"""Plans for `rlcore plan`: layouts of a recipe on devices that need not be there, with their memory and seconds."""
