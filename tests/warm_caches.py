"""Fill caches that every run reads. Processes that are forked from one that has imported this
module have them from the start.
"""

from transformers.conversion_mapping import get_checkpoint_conversion_mapping

from valence.config.describe import schema_of
from valence.config.schema import Recipe
from valence.reports.rendering import ENVIRONMENTS, SOURCES

get_checkpoint_conversion_mapping("llama")
schema_of(Recipe)
for template in SOURCES:
    if template.endswith(".j2"):
        ENVIRONMENTS[template.split(".")[-2]].get_template(template)
