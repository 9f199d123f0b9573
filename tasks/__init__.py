"""Prefect's units of retry, each adapting one call of the engine; and all of MLflow."""
