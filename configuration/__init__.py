"""What a user can set without touching code: config classes, backbone presets, training and accelerate recipes."""
