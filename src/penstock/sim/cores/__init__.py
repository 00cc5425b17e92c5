"""Simulators of single cores: no broker, no bytes, thousands of seeds per minute."""
