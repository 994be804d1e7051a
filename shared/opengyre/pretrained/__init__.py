"""Small pretrained models from packages: found, checked, turned into a model directory in Hugging Face's layout."""
