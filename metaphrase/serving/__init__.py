"""HTTP server for models: the APIs of Hugging Face, LibreTranslate, DeepL and OpenAI."""
