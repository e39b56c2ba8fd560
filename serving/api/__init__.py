"""The HTTP API in the shapes of OpenAI and Anthropic, and pages for operators."""
