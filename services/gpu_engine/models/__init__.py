"""What a model is: checkpoint readers, and families as layers and tensor names. No arithmetic of a forward pass."""
