"""Facts shipped with memest: GPUs and model configurations, each with its source."""
