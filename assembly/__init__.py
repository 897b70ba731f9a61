"""Puts vision-language models together: from two backbones (compose) or around a finished model (graft)."""
