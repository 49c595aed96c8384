"""Sphinx's settings for the site. `docs/build` calls Sphinx on the pages that `sitetools/sources.py` lays out."""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]  # docs/, and the repository

from sitetools.links import REPOSITORY  # noqa: E402

import jaxshard  # noqa: E402

project = "jaxshard"
author = "The jaxshard authors"
copyright = author
version = release = jaxshard.__version__

extensions = ["myst_nb", "sphinx_copybutton", "sitetools.references"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 4
nb_execution_mode = "off"
nb_merge_streams = True
nitpicky = True
maximum_signature_line_length = 80
linkcheck_timeout = 20

html_theme = "furo"
html_title = f"jaxshard {version}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_copyright = False
html_show_sphinx = False
html_copy_source = False
html_show_sourcelink = False
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
copybutton_exclude = ".linenos, .gp, .go"
html_theme_options = {
    "source_repository": REPOSITORY,
    "source_branch": "main",
    "source_directory": "docs/",
    "top_of_page_buttons": [],
}
pygments_style = "tango"
pygments_dark_style = "github-dark"
