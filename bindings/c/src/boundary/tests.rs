use super::*;

#[test]
fn a_panic_becomes_a_status_with_its_words() {
    assert_eq!(answer(|| panic!("the {}", "defect")), kvik_status::KVIK_ERROR_INTERNAL);
    assert!(status::last_message().contains("the defect"));
}
