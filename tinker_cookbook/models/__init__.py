"""Facts about a model before it is loaded: families, shapes, adapter sizes, hyperparameters, its renderer."""
