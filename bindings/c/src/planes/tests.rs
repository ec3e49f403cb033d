use super::*;

const PAGE: u64 = 2 << 20;

fn offsets(n_buffers: u32, block_bytes: u64, n_layers: u32, has_values: bool) -> Vec<u64> {
    let geometry = Geometry::try_new(n_buffers, PAGE, 8).unwrap();
    let planes = Planes::try_new(&geometry, block_bytes, n_layers, has_values).unwrap();
    let parts = if has_values { 2 } else { 1 };
    (0..n_layers).flat_map(|layer| (0..parts).map(move |part| planes.offset_bytes(layer, part))).collect()
}

#[test]
fn planes_follow_each_other_in_one_buffer() {
    assert_eq!(offsets(1, 4096, 2, true), [0, 1024, 2048, 3072]);
    assert_eq!(offsets(1, 4096, 2, false), [0, 2048]);
}

#[test]
fn a_buffer_for_each_layer_has_its_k_and_v() {
    let stride = 8 * PAGE;
    assert_eq!(offsets(2, 4096, 2, true), [0, 2048, stride, stride + 2048]);
}

#[test]
fn a_buffer_for_each_plane_has_it_at_its_start() {
    let stride = 8 * PAGE;
    assert_eq!(offsets(4, 4096, 2, true), [0, stride, 2 * stride, 3 * stride]);
}

#[test]
fn planes_that_do_not_fit_are_refused_with_the_numbers() {
    let geometry = Geometry::try_new(3, PAGE, 8).unwrap();
    for (block_bytes, n_layers, words) in
        [(4096, 0, "`n_layers` is 0"), (4096, 2, "the 3 buffers"), (4097, 3, "4097 bytes into 2 planes")]
    {
        let failure = Planes::try_new(&geometry, block_bytes, n_layers, true).unwrap_err();
        assert!(failure.message.contains(words), "{}", failure.message);
    }
}
