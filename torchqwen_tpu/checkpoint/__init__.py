"""Checkpoints in the published layout: from files to the devices and back."""
