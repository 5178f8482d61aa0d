"""Read the results of the analysis, and load them into PostgreSQL for the API.

    latest.json + Parquet ──► reader ──► by_organisation ──► analysis_rows
                                └──► reconciliation totals, report (one HTML file)

An organisation sees only the findings of its own rooms and subscriptions.
"""
