"""The evidence: real training steps on the meta device, every allocation written down."""
