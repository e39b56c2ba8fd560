"""HTTP with OpenAI's shapes: requests are checked, answers are streamed or sent whole."""
