"""HTTP server for models: the APIs of Hugging Face, LibreTranslate, DeepL, OpenAI and the Open Inference Protocol."""
