"""Draw the results of the analysis as one self-contained HTML file.

    analysis tables ──► data ──► charts (Altair, drawn as SVG) ──► page
                         └─────► captions ───────────────────────┘

Journeys are read in batches and counted into bins, so memory does not grow with the log. The
package needs no Java.
"""
