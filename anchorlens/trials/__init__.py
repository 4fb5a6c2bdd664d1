"""All batches and all metrics, on disk and over processes."""
