"""The machine of opdflow: generate ‖ score ‖ train. Knows neither Prefect nor MLflow."""
