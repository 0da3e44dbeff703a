"use strict";
const marks = { show() {}, wire() {} };
