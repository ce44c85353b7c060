"""An engine without a model: real pages, real bytes, no computation. For measuring everything around an engine."""
