"""Why is acceptance low? One measured check per function; `run` gathers what they need."""
