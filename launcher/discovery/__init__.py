"""Query machines for their devices; find those on the network and write an inventory."""
