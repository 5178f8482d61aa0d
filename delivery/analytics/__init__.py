"""Export the delivery log as Parquet, analyse it with Spark, store the results, draw the report.

export/     log rows → Parquet segments
spark/      segments → findings (the only part that needs Java)
results/    findings → PostgreSQL, and back to the API by organisation
report/     findings → one HTML file
"""
