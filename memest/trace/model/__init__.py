"""A model on meta: built, adapted, quantized, told apart by its parts."""
