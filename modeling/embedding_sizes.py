"""Embedding sizes: how the embeddings of sources and targets, and the head, grow and shrink with their vocabularies."""

from torch import nn

from .stacks import MetaphrasePreTrainedModel


class EncoderDecoderEmbeddings(MetaphrasePreTrainedModel):
    """Resizing and tying of one or two vocabularies. `resize_token_embeddings` is for the source, or for both if shared."""

    def _resize_token_embeddings(self, new_num_tokens, pad_to_multiple_of=None, mean_resizing=True):
        if self.config.share_embeddings:
            embeddings = super()._resize_token_embeddings(new_num_tokens, pad_to_multiple_of, mean_resizing)
            self.config.vocab_size = self.config.decoder_vocab_size = embeddings.num_embeddings
            return embeddings
        old = self.get_input_embeddings()
        new = self._get_resized_embeddings(old, new_num_tokens, pad_to_multiple_of, mean_resizing)
        self.set_input_embeddings(new.requires_grad_(old.weight.requires_grad))
        # A weight that DeepSpeed has shared out has no rows.
        self.config.vocab_size = new.num_embeddings
        return new

    def _get_resized_lm_head(self, *args, **kwargs):
        # The parent initializes new rows as those of any projection.
        self._is_resizing_head = True
        try:
            return super()._get_resized_lm_head(*args, **kwargs)
        finally:
            self._is_resizing_head = False

    def resize_decoder_token_embeddings(
        self, new_num_tokens: int, pad_to_multiple_of: int | None = None, mean_resizing: bool = True
    ) -> nn.Module:
        """Resizes the target vocabulary, embedding and output projection, where it is not the source's.

        Args:
            new_num_tokens: Entries of the new vocabulary; more are initialized, fewer are cut off at the end.
            pad_to_multiple_of: Rounds the number up.
            mean_resizing: Draw new entries from the distribution of the old ones.

        Raises:
            ValueError: If source and target share their embedding.
        """
        if self.config.share_embeddings:
            raise ValueError(
                "`share_embeddings` must be false to resize the target alone: use `resize_token_embeddings`."
            )
        decoder = self.get_decoder()
        old = decoder.embed_tokens
        new = self._get_resized_embeddings(old, new_num_tokens, pad_to_multiple_of, mean_resizing)
        decoder.embed_tokens = new.requires_grad_(old.weight.requires_grad)
        size = new.num_embeddings
        head = self.get_output_embeddings()
        if head is not None:
            resized = self._get_resized_lm_head(head, size, mean_resizing=mean_resizing)
            self.set_output_embeddings(resized.requires_grad_(head.weight.requires_grad))
        self.config.decoder_vocab_size = size
        self.tie_weights()
        return new
