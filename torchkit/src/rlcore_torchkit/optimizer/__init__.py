"""The meaning of `[optimizer]` under every trainer: settings of each tensor, Muon's update, moments in 8 bits."""
