"""Data: token corpora, packed documents, indexed sources, mixtures, and global batches on the devices.

The sequence of global batches depends only on (seed, step), not on the number of hosts: the layout determines the rows
that a host reads. So the step is all that is needed to resume. Imports `core/`, `distributed/` and `storage/`.
"""

from jaxshard.data.batches import batches as batches
from jaxshard.data.batches import local_batches as local_batches
from jaxshard.data.corpus import HELD_OUT as HELD_OUT
from jaxshard.data.corpus import Corpus as Corpus
from jaxshard.data.corpus import load as load
from jaxshard.data.corpus import stdlib as stdlib
from jaxshard.data.documents import Documents as Documents
from jaxshard.data.documents import documents as documents
from jaxshard.data.documents import tokenize as tokenize
from jaxshard.data.examples import Examples as Examples
from jaxshard.data.examples import examples as examples
from jaxshard.data.mixture import Mixture as Mixture
from jaxshard.data.mixture import mixture as mixture
from jaxshard.data.order import permute as permute
from jaxshard.data.packing import Packed as Packed
from jaxshard.data.packing import packed as packed
from jaxshard.data.source import Source as Source
from jaxshard.data.stream import Batches as Batches
from jaxshard.data.tokenizer import Tokenizer as Tokenizer
from jaxshard.data.tokenizer import tokenizer as tokenizer
from jaxshard.data.windows import Windows as Windows
from jaxshard.data.windows import eval_batches as eval_batches
from jaxshard.data.windows import windows as windows
