"""Measures norms, angles and gradients in any Hugging Face vision-language model and reports them."""
