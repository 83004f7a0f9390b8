"""Pictures to classes, with a model that sees: `python -m recipes.vlm_classifier.train`."""
