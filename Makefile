typetree:
	@mkdir -p build/types/weft && for d in kernels models serving; do ln -sfn ../../../$$d build/types/weft/$$d; done
