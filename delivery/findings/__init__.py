"""What the analysis has found, on its way to people: from its tables into PostgreSQL for the API, and onto the terminal.

latest.json + Parquet ──► published ──► shares (an organisation sees its own rooms alone) ──► analysis_rows
                              └──► books (is anything lost?), report (one HTML file)
"""
