"""NeMo Automodel's packing of vision data sets with packs that are alike: run a recipe with it.

    torchrun --nproc-per-node 8 examples/automodel_packing.py recipe.yaml

Under torchrun every rank runs the recipe in its own process, which is where ours has to be. The recipe packs with
`balance_media_tokens`; nothing else of it changes.
"""

from nemo_automodel.cli.app import main

from omnibal_ext.integrations.nemo_automodel import install

if __name__ == "__main__":
    install()
    main()
