//! Chunks that are coded again by another codec.

use kvik_codec::{Codec, encode};

use super::page::{PAGE_BYTES, Page, checksum_of};

/// What a stored chunk, with its page, is by another codec; `None` where it has to stay as it is: it is by that codec already, was
/// coded with loss, is not what its page says, or would not become smaller.
pub(super) fn recode(wanted: &dyn Codec, readable: &[Box<dyn Codec>], stored: &[u8]) -> Option<Vec<u8>> {
    let (page, mut rest) = stored.split_first_chunk::<PAGE_BYTES>()?;
    let Page::Coded { head, checksums } = Page::read(page).ok()? else { return None };
    let codec = readable.iter().find(|codec| codec.id() == head.codec_id)?;
    if head.codec_id == wanted.id() || !codec.is_lossless() || wanted.check(&head.shape).is_err() {
        return None;
    }
    let mut raw = vec![0; head.shape.chunk_bytes()];
    let sections = raw.chunks_exact_mut(head.shape.section_bytes().max(1));
    for (layer, (section, checksum)) in sections.zip(&checksums).enumerate() {
        let (coded, behind) = rest.split_at_checked(*head.layer_bytes.get(layer)? as usize)?;
        if checksum_of(coded) != *checksum {
            return None;
        }
        codec.decode_layer(&head.shape, layer, coded, section).ok()?;
        rest = behind;
    }
    let mut coded = Vec::with_capacity(stored.len());
    encode(wanted, &head.shape, &raw, &mut coded).ok()?;
    let (page, head_bytes) = Page::of_coded(&coded)?;
    let recoded = [&page.to_bytes()[..], coded.get(head_bytes..)?].concat();
    (recoded.len() < stored.len()).then_some(recoded)
}
