"""The stages: each turns a flow into a flow, and keeps the laws of `streamline.testing`."""
