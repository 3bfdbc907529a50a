"""The store's tasks on the devices: followed, loaded, resolved and kept within a budget."""
