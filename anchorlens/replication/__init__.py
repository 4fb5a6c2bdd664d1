"""The paper's figures and tables for your model."""
