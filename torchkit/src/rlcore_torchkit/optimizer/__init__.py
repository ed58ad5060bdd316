"""What `[optimizer]` means, the same under every trainer: settings of each tensor, Muon's update, moments in 8 bits."""
